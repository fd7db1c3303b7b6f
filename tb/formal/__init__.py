"""Proofs for all inputs, all stall patterns and all times: ``python -m tb.formal``.

:mod:`tb.formal.properties` lists what is claimed of what; :mod:`tb.formal.monitors` watches streams,
:mod:`tb.formal.arithmetic` compares combinational functions with their definitions, :mod:`tb.formal.faults` plants the
faults that each claim must catch, and :mod:`tb.formal.engine` runs the tools.
"""
