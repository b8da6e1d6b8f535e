"""A server's end of HTTP/2 (RFC 9113, RFC 7541), without I/O. docs/security.md lists the threats."""
