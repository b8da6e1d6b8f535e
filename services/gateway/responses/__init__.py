"""The Responses API: a response is a generation, shown as items and numbered events."""
