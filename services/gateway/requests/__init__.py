"""From a request's body to its generations: decoded, checked, tokenized."""
