"""A checkpoint of Overspill opens in an engine that is not the one it was saved from: of another format or optimizer,
with other names, or in part."""
