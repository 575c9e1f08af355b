"""What can be trained: one file per method behind the protocol of `method.py`."""
