// Light, dark, or as the system has it. No module, since those run after the first paint: a page would flash.
{
  const KEY = "ryzanstein.theme";
  const show = () => {
    const chosen = localStorage.getItem(KEY) ?? "system";
    document.documentElement.dataset.theme = chosen;
    const field = document.getElementById("theme");
    if (field) field.value = chosen;
  };
  show();
  addEventListener("storage", show); // another tab has chosen
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme")?.addEventListener("change", ({ target }) => {
      localStorage.setItem(KEY, target.value);
      show();
    });
  });
}
