"""The OpenAPI document: made from the routes' own descriptions and the structs that decode requests."""
