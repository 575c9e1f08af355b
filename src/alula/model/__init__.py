"""One decoder by flags, and where its weights come from."""
