"""Messages about a run to chat, mail and webhooks, which the library Apprise sends."""
