"""Watch: sandboxes that say in their metadata which memory they are to have get it without a call."""
