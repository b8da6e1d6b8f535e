"""The OpenAPI document, made from the routes' descriptions and the tables of the checks."""
