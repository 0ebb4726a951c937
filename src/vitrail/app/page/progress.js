// A bar with a cancel button; work that ends quickly never shows it.
import { find } from "./tools.js";

const PATIENCE = 250;
const MEASURED = 3, WORTH = 10, IN_SECONDS = 90; // s of work before a guess, s left for it to be told, and to be told in s

export class Progress {
  constructor(box) {
    this.box = box;
    this.timer = 0;
    this.cancel = null;
    this.first = null; // {share, now} of the first step that was heard
    this.last = 0; // share of the last one
    find("button", box).addEventListener("click", () => this.cancel?.());
  }

  start(text, cancel, patience = PATIENCE) {
    clearTimeout(this.timer);
    this.cancel = cancel;
    this.first = null;
    this.show(text, null);
    this.timer = setTimeout(() => { this.box.hidden = false; }, patience);
  }

  // Events of a job: its place in the queue, or how far it is.
  hear(event, data, now = performance.now() / 1000) {
    if (event === "queued" && data.position > 0) this.show(`Waiting: ${data.position} before this`, null);
    if (event === "progress" && data.total) {
      const counts = data.total > 1 ? ` · ${Math.floor(data.done)} of ${data.total}` : "";
      this.show(`${data.what}${counts}${this.left(data.done / data.total, now)}`, data.done / data.total);
    }
  }

  // How long it may still take, from the pace since the first step; a share that falls is other work.
  left(share, now) {
    if (!this.first || share < this.last) this.first = { share, now };
    this.last = share;
    const passed = now - this.first.now, gained = share - this.first.share;
    const rest = ((1 - share) * passed) / gained;
    if (passed < MEASURED || !(gained > 0) || rest < WORTH) return "";
    return ` · about ${rest < IN_SECONDS ? `${10 * Math.round(rest / 10)} s` : `${Math.round(rest / 60)} min`} left`;
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
