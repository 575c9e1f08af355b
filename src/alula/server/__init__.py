"""The OpenAI API over one engine: FastAPI in front, one thread that steps, a bridge between them."""
