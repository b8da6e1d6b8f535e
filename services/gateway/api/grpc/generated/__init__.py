"""Made from `protos/` by `make protos`; a test makes it again and compares."""
