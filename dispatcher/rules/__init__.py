"""What a dispatcher decides: whose a file is, what becomes of an event, when to read and retry. Pure."""
