// The search of the site runs in a worker. Browsers start no worker for a page that is opened from the disk: there a
// hidden frame takes its place. It replaces the script of this name at unpkg.com, which the offline plugin would load.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame.contentWindow;
      this.loaded = new Promise(resolve => { this.resolve = resolve; });
      this.frame.addWorker = scope => {
        scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
        scope.onload = this.resolve;
      };
      frame.contentDocument.open();
      frame.contentDocument.write(`<script>addWorker(window)</script><script src="${url}"></script>`);
      frame.contentDocument.close();
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
