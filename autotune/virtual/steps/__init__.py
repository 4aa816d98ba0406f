"""Optimizer steps of a trace: their phases, memory levels, repetitions and scaled copies."""
