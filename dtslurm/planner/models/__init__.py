"""The shapes of models: by name, or from the configuration files that Hugging Face publishes."""
