"""Tool calls and reasoning in the text of models: their notations, parsers and grammars. Pure."""
