"""A whole system: who runs where, its roles as processes, who watches over them, and what it says of itself.

The only wiring: it knows the real clock and the real dice. Never decides the fate of an event.
"""
