"""The checks of ``kvt doctor``: each looks at one part of a deployment and says what to change."""
