// A progress bar with a cancel button; short work never shows it.
import { find } from "./helpers.js";

const PATIENCE = 250;
const MIN_ELAPSED = 3, MIN_REMAINING = 10, MAX_SECONDS = 90; // s before an estimate, s left to show it, and to show it in s

export class Progress {
  constructor(box) {
    this.box = box;
    this.timer = 0;
    this.cancel = null;
    this.first = null; // {share, now} of the first event
    this.last = 0; // share of the last event
    find("button", box).addEventListener("click", () => this.cancel?.());
  }

  start(text, cancel, patience = PATIENCE) {
    clearTimeout(this.timer);
    this.cancel = cancel;
    this.first = null;
    this.show(text, null);
    this.timer = setTimeout(() => { this.box.hidden = false; }, patience);
  }

  // Events of a job: its position in the queue, or its progress.
  update(event, data, now = performance.now() / 1000) {
    if (event === "queued" && data.position > 0) this.show(`Queued: ${data.position} ahead`, null);
    if (event === "progress" && data.total) {
      const counts = data.total > 1 ? ` · ${Math.floor(data.done)} of ${data.total}` : "";
      this.show(`${data.what}${counts}${this.left(data.done / data.total, now)}`, data.done / data.total);
    }
  }

  // The remaining time, extrapolated since the first event; a share that falls belongs to other work.
  left(share, now) {
    if (!this.first || share < this.last) this.first = { share, now };
    this.last = share;
    const passed = now - this.first.now, gained = share - this.first.share;
    const rest = ((1 - share) * passed) / gained;
    if (passed < MIN_ELAPSED || !(gained > 0) || rest < MIN_REMAINING) return "";
    return ` · about ${rest < MAX_SECONDS ? `${10 * Math.round(rest / 10)} s` : `${Math.round(rest / 60)} min`} left`;
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
