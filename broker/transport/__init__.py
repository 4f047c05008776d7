"""Message transport between the broker and its peers, over ZeroMQ and in memory."""
