"""Whether a chat template is one, as gateways will compile it: found out before weights are read. None of it is run."""

from jinja2 import TemplateError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LONGEST = 1 << 20  # characters; gateways judge longer ones, in a process with limits


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which transformers has beside Jinja's own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def problem_with(template: str) -> str:
    """What is wrong with it, as the end of "its template ..."; empty: nothing is."""
    environment = ImmutableSandboxedEnvironment(extensions=[_GenerationTag, loopcontrols])
    if len(template) > _LONGEST:
        return ""
    try:
        parsed = environment.parse(template)
        environment.compile(parsed)
    except (TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        return f"is no Jinja template ({str(error).rstrip('.')}{f', in its line {line}' if line else ''})"
    return (
        "" if "messages" in meta.find_undeclared_variables(parsed) else "shows no messages, so it is no chat template"
    )
