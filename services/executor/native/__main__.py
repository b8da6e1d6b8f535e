"""`python -m services.executor.native`: one line of JSON, the levels of instructions that this processor runs, the one
that is chosen, and why there is none."""

import json

from services.executor.native.library import LEVEL, choose_level, levels, load_library, why_not
from shared.errors import ConfigurationError

if __name__ == "__main__":
    try:
        choose_level("")
        library = load_library()
        told = {"levels": levels(), "chosen": library.level if library else "", "reason": why_not()}
    except ConfigurationError as error:
        told = {"levels": levels(), "chosen": "", "reason": str(error), "setting": LEVEL}
    print(json.dumps(told))  # noqa: T201  # whoever started this process reads it
