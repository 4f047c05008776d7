"""Transport of messages between the broker and its peers: ZeroMQ and in memory."""
