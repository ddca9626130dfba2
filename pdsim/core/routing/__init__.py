"""The instances of one role, for the router: their loads, and what a policy may ask about them."""
