"""Training of draft heads: data the target wrote itself, features on the fly, EAGLE-3 training-time test."""
