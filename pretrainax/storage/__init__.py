"""Lets a user's folders lie in object stores: what is below a URL is kept as a folder of this machine beside it."""
