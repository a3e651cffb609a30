"""Images: where layers are kept (depot) and how they are made (build). Knows files and tools, no yard."""
