"""Jobs that outlive their gateway, of whatever kind: their leases, and who runs which."""
