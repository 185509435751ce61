"""The joiner: pairs foreign events with their primary, registers them, writes the joined log (paper 3.3).

Never reads the logs of either stream and remembers no event, only its intents: what it has asked the
IdRegistry to register and not yet written. Other rooms come in through `joiner.client`; users' code stands
on `joiner.adapter`.
"""
