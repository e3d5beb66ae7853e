"""Encryption and signatures: keep a store's contents to those who have its keys, and detect what others wrote.

Two stores around a store: ``EncryptedStore`` encrypts every object, and hides names, before it is passed on;
``SignedStore`` signs the small objects that name the others. Layers above do not know about either.
"""
