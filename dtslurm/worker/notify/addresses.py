"""Check the addresses of notifications with the library Apprise; sends nothing."""

from typing import Any, Dict, List


def check(urls: List[str]) -> Dict[str, Any]:
    """Return why each address is invalid (empty for a valid one), and then also the known schemes."""
    import apprise

    asset = apprise.AppriseAsset(async_mode=False)
    problems = []
    for url in urls:
        with apprise.LogCapture(level=apprise.logging.WARNING, fmt="%(message)s") as log:
            try:
                is_valid = apprise.Apprise(asset=asset).add(url)
            except Exception as error:  # noqa: BLE001 - of any service of the library
                is_valid, problem = False, type(error).__name__
            else:
                problem = ""
            lines = log.getvalue().splitlines()
        problems.append("" if is_valid else (lines[0] if lines else problem or "it is invalid"))
    return {"problems": problems, "schemes": _list_schemes(asset) if any(problems) else []}


def _list_schemes(asset: Any) -> List[str]:
    import apprise

    services = apprise.Apprise(asset=asset).details()["schemas"]
    keys = ("protocols", "secure_protocols")
    return sorted({str(scheme) for service in services for key in keys for scheme in service[key] or []})
