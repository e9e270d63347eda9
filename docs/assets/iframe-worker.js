// Browsers start no worker for a page opened from disk, and the site's search runs in one. On such pages this runs a
// worker's script in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #waiting = []; // messages sent before the script was loaded
    #ready = false;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#frame.srcdoc = "<!doctype html><title>worker</title>";
      this.#frame.addEventListener("load", () => {
        const inside = this.#frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.addEventListener("load", () => {
          this.#ready = true;
          this.#waiting.splice(0).forEach((data) => this.postMessage(data));
        });
        inside.document.head.append(script);
      }, { once: true });
      document.body.append(this.#frame);
    }

    postMessage(data) {
      if (!this.#ready) this.#waiting.push(data);
      else this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
