"""From the bodies of Ollama's /api/chat, /api/generate and /api/embed to what the other APIs ask for."""
