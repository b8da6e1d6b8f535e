"""Files of tenants: uploaded whole or in parts, kept in the object store, read line by line."""
