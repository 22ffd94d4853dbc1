"""Lets a user's folders lie in object stores, and models on the hub: what is there has a folder of this machine."""
