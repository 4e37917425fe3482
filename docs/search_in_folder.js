// Browsers refuse the worker of Material's search to pages that are opened from a folder: its script runs in a frame.
window.Worker = class extends EventTarget {
  constructor(url) {
    super();
    this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
    document.body.append(this.frame);
    this.inner = this.frame.contentWindow;
    this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = this.inner.document.createElement("script");
    this.ready = new Promise((done) => (script.onload = done));
    script.src = url;
    this.inner.document.body.append(script);
  }
  postMessage(data) {
    this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
  }
  terminate() {
    this.frame.remove();
  }
};
