"""`maxtrain fit`: memory and communication on devices that need not be here."""
