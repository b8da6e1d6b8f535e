"""Spans of requests and generations, as OpenTelemetry's conventions have them."""
