// Not a module, so that it runs before the first paint and the page never flashes in the wrong theme.
try {
  const theme = localStorage.getItem("engine-core.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is switched off; the system's theme is used.
}
