"""Every message on the bus, typed: one definition, MessagePack on the wire.

Messages on the hot path (token frames) are arrays on the wire; all others are maps with their
field names, so that a program in any language can read and write them. Fields are only ever added,
at the end and with a default: services of two versions can talk during a rolling update.

The package has the messages between services; what one kind of user needs is imported from its own module: `records`
of generations, `batches`, `debugging`, hand-over in `groups`.
"""

from shared.messages.cluster import *
from shared.messages.generations import *
from shared.messages.groups import *
from shared.messages.registry import *
