// Before the first paint: a theme that was chosen takes precedence over the system's.
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen) document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is denied: the system's theme it is.
  }
})();
