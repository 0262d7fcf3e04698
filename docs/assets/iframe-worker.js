/* Search without a server. Browsers start no Worker from a file:// page; the theme then takes a stand-in, which it
 * would fetch from the network. This is ours: the worker's script runs in a hidden frame, and messages go both ways. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve());
      this.load(url).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = done;
        script.onerror = failed;
        this.inside.document.body.appendChild(script);
      });
    }
    postMessage(data) {
      if (this.ready) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
