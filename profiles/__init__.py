"""Shipped profiles, one JSON a box; package data."""
