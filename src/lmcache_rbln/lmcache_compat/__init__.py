# SPDX-License-Identifier: Apache-2.0
"""The one package that touches LMCache's internals.

Each touch says what it does, why, for which LMCache versions, and what makes it obsolete.
"""
