"""What keeps a store's contents to those who have its keys, and tells what they wrote from what others did.

Two stores around a store: ``SealedStore`` encrypts every object, and hides names, before it goes on; ``SignedStore`` signs
the small objects that name the others. Nothing above them knows.
"""
