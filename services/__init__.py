"""The processes of Ryzanstein: gateway, scheduler, health monitor, executor, and the command line."""
