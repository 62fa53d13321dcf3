"""Which plays may start now: a pure function of what the journal says. (signatures; the body is being written)"""
