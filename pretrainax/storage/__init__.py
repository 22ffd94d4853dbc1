"""Lets a user's folders lie in object stores, and models on the hub; what is there is kept in folders of this machine."""
