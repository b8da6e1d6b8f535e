"""What all services share: messages, subjects, bus, settings, errors, life cycle, telemetry."""
