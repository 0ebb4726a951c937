// A bar with a cancel button; work that ends quickly never shows it.
import { find } from "./tools.js";

const PATIENCE = 250;

export class Progress {
  constructor(box) {
    this.box = box;
    this.timer = 0;
    this.cancel = null;
    find("button", box).addEventListener("click", () => this.cancel?.());
  }

  start(text, cancel, patience = PATIENCE) {
    clearTimeout(this.timer);
    this.cancel = cancel;
    this.show(text, null);
    this.timer = setTimeout(() => { this.box.hidden = false; }, patience);
  }

  // Events of a job: its place in the queue, or how far it is.
  hear(event, data) {
    if (event === "queued" && data.position > 0) this.show(`Waiting: ${data.position} before this`, null);
    if (event === "progress" && data.total) {
      const counts = data.total > 1 ? ` · ${Math.floor(data.done)} of ${data.total}` : "";
      this.show(`${data.what}${counts}`, data.done / data.total);
    }
  }

  show(text, share) {
    const bar = find("progress", this.box);
    find("p", this.box).textContent = text;
    if (share === null) bar.removeAttribute("value");
    else bar.value = share;
  }

  stop() {
    clearTimeout(this.timer);
    this.cancel = null;
    this.box.hidden = true;
  }
}
