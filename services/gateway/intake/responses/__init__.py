"""From the body of /v1/responses to a chat completion."""
