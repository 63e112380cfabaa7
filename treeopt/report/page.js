for (const tree of document.querySelectorAll("svg.tree")) {
  const detail = tree.closest("section").querySelector(".detail");
  const nodes = [...tree.querySelectorAll(".node")];
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const parentOf = (node) => byId.get(node.dataset.parent);
  const show = (node) => {
    for (const lit of tree.querySelectorAll(".lit")) lit.classList.remove("lit");
    for (let one = node; one; one = parentOf(one)) one.classList.add("lit");
    detail.textContent = node.querySelector("title").textContent.split("\n").join(" · ");
  };
  const centre = (node) => {
    const box = node.lastElementChild.getBBox();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  tree.addEventListener("mousemove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(tree.getScreenCTM().inverse());
    let best = null, least = 20;
    for (const node of nodes) {
      const [x, y] = centre(node);
      const far = Math.hypot(x - at.x, y - at.y);
      if (far < least) [best, least] = [node, far];
    }
    if (best) show(best);
  });
  const focus = (node) => {
    if (!node) return;
    for (const one of nodes) one.setAttribute("tabindex", one === node ? "0" : "-1");
    node.focus();
  };
  nodes.forEach((node, i) => {
    if (i) node.setAttribute("tabindex", "-1");
    node.addEventListener("focus", () => show(node));
    node.addEventListener("keydown", (event) => {
      const beside = (step) => (nodes[i + step]?.dataset.depth === node.dataset.depth ? nodes[i + step] : null);
      const next = {
        ArrowUp: () => parentOf(node),
        ArrowDown: () => nodes.find((one) => one.dataset.parent === node.id),
        ArrowLeft: () => beside(-1),
        ArrowRight: () => beside(1),
      }[event.key];
      if (next) {
        event.preventDefault();
        focus(next());
      }
    });
  });
}
