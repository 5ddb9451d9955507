"""Chat on the wire: messages, tools, and the parsed answer."""
